"""From ten naive lines of torch to the library's kernel, in steps that run: chapter 04."""
