// Package shim has the functions and types that the rewritten test suites use in place of
// those of package net, crypto/tls and net/http/httptest. They have the same names.
// Connections of the networks tcp, tcp4 and tcp6 are rdmanet's. Other networks are left to
// package net.
//
// Test suites use loopback addresses, which RDMA devices do not have. If RDMANET_VM_ADDR
// and RDMANET_VM_ADDR6 have the addresses of an RDMA device, shim listens and dials there.
// Its listeners still report the loopback address, because suites compare it, and have
// certificates for it.
package shim
