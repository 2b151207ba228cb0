"""Generation of responses: the interface, and the engines that implement it."""
