"""Files with parameters: TVM's own formats, and the parts that others' can be read in."""
