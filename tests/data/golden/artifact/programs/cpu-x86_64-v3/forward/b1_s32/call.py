def call(args):
    (arg0, arg1) = args
    return (kernel(arg0, arg1),)
