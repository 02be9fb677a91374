"""Forward passes as code bases write them, with the right roles by hand."""
