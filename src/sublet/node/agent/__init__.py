"""The part that knows the hardware and carries out grants."""
