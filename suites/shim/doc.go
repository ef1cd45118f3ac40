// Package shim has what the rewritten test suites call in place of package net,
// crypto/tls and net/http/httptest. Its functions and types have the names of those
// that they stand for. Connections of the networks tcp, tcp4 and tcp6 are rdmanet's;
// all other networks remain with package net.
//
// Test suites use loopback addresses, which RDMA devices do not serve. Where
// RDMANET_VM_ADDR and RDMANET_VM_ADDR6 name the addresses of an RDMA device, shim
// listens and dials there instead. Its listeners still report the loopback address,
// because suites compare it, and have certificates for it.
package shim
