extern "C" void kernel(const float* in0, float* out0) { *out0 = *in0; }
