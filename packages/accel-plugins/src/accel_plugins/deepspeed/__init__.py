"""Configuration of DeepSpeed, and the code around its engine. The library is imported only when used."""
