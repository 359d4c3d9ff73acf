"""What applications do while everything breaks: each deed is one operation with its line in the journal."""
