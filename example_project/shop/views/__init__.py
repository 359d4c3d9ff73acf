"""What people see (`pages`) and do (`actions`)."""
