"""The `gemini-ft` command."""
