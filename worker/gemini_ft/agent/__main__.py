"""`python -m gemini_ft.agent`."""

import sys

from gemini_ft.agent.main import main

if __name__ == "__main__":
    sys.exit(main())
