"""`python -m gemini_ft.agent.launcher`."""

import os
import sys

from gemini_ft.agent.launcher.main import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed; taking torch apart would keep the agent, which waits for this process, for seconds.
    os._exit(status)
