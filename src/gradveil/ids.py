"""The ids that every vocabulary begins with."""

PADDING = 0  # fills a sequence up; not seen by models, and no loss is taken there
UNKNOWN = 1  # a word that is not in the vocabulary
START = 2  # stands before a sequence that is to be told to a class
SPECIAL = ("", "<unknown>", "<start>")  # as text
