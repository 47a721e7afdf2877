"""What a server runs: check an artifact, bind its programs to a live model.

`check` compares artifact and machine, `model` compares artifact and live model,
`program` loads host code and kernels, `dispatch` sends a call to its bucket, `attach`
puts it together. Needs torch (and safetensors for constants), and nothing that plain
``import torch`` doesn't load: no Dynamo, no Inductor, no Triton.
"""
