"""Puts brokers, agents and supervisors together."""
