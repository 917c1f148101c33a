"""Machinery: images found as the solution of equations, by Gauss-Newton steps."""
