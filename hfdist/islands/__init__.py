"""Separate launches that train one model together and speak once in many steps: who takes part, what travels, what is
made of it.
"""
