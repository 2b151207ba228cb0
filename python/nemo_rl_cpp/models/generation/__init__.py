"""Generation: the contract and the native engine."""
