"""Commands about what is packaged with us: the pages of the documentation, and the tests of the suite."""
