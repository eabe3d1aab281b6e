"""What crosses processes: messages, functions by name, values as plain data."""
