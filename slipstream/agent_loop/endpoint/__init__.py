"""Agents that know nothing of us: they speak an API's HTTP, and what they say becomes a token-exact stream."""
