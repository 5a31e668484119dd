"""The process that outlives the office: guests, fence table, deadlines, teardown. Standard library, one thread."""
