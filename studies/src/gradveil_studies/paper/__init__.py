"""Every table and figure of the paper, beside the paper's own numbers."""
