"""Where brokers, agents and supervisors are put together."""
