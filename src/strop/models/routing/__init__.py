"""Router replay: the learner computes each token with the experts that the engine chose."""
