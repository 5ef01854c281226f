"""`python -m gemini_ft.agent.launcher`."""

import sys

from gemini_ft.agent.launcher.main import main

if __name__ == "__main__":
    sys.exit(main())
