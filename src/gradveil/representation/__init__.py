"""The paper's defence: layers as linear maps, leak scores of a representation, and what can be proved of it."""
