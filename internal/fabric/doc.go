// Package fabric is an RDMA device for datagrams that exists in memory only, so that
// what uses UD queue pairs is tested on machines without RDMA, with the race
// detector, and against peers and mishaps that no real device would bring about on
// request. It passes for RoCE. It has no connections.
package fabric
