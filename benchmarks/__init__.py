"""What Gemini-FT costs and gains, measured on this machine as ratios against a limit or another way in the same run."""
