"""What is known of the structure of checkpoint files. Each module finds the regions of one format."""
