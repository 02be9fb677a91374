"""What the models of several families are made of."""
