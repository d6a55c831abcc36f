"""Problems with a reference answer: mathematics and multiple choice, and the sets of them."""
