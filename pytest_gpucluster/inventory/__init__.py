"""What is there: readers that return dataclasses of plain data. They judge nothing."""
