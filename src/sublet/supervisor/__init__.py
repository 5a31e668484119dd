"""What outlives the office: guests, the fence table, deadlines, teardown. Standard library only, one thread, one loop."""
