"""The sections that are honoured, in whole or in part: one file each."""
