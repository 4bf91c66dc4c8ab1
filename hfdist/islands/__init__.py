"""Islands: separate launches that train one model together, over slow networks. They exchange changes of the weights
once in many steps, or send gradients to a parameter server.
"""
