"""slipstream: fully asynchronous, streaming RL for tool-using language-model agents."""
