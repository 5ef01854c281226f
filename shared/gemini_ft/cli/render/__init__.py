"""What the API shows, as tables and pictures for terminals; pure functions."""
