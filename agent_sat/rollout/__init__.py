"""Episodes: chat tokens, the agent loop of one episode, groups, and the engines that sample."""
