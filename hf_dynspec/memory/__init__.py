"""What models remember of texts."""
