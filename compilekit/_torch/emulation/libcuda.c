// The driver library's name, for libraries that look for it. It has no device to offer.
int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return 0;
}
