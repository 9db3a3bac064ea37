"""The policy: what the YAML says, checked, as values. Pure except for reading the file."""
