"""What outlives the office: guests, the fence table, deadlines, teardown. Standard library, one thread, one loop."""
