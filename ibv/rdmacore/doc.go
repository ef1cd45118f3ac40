// Package rdmacore is the provider for the devices of rdma-core: RDMA adapters, and Linux's
// software devices Soft-RoCE and siw. It implements package ibv by libibverbs and
// librdmacm.
//
// The two libraries are loaded at run time, on the first call of [New]. A build needs cgo,
// but neither the libraries nor their headers. Without cgo, and on other systems than
// Linux, the package compiles too, and New returns an error with the reason why there are
// no devices.
//
// The Go runtime's poller waits for completion and connection events, so a goroutine that
// waits needs no thread. C keeps no pointers to Go memory, except the addresses of
// registered regions, which stay reachable until the MR is closed.
//
// Calls that post, poll, arm and take events are made for each message. Where the driver is
// known not to enter the kernel in them, they are made without a notice to the scheduler,
// like calls of Go functions: see internal/ccall. On other devices, Soft-RoCE and siw among
// them, they go by cgo. The environment variable RDMANET_CCALL decides otherwise for all
// devices: "on", "off", or "auto", the default. With the race detector, and in versions of
// Go that this was not tested with, all calls go by cgo.
//
// No call into C blocks, with three exceptions:
//
//   - siw connects inside the kernel, for as long as TCP tries (tcp_syn_retries, two
//     minutes). Connect returns when its context ends, but the Close of the queue pair then
//     waits for the kernel.
//   - The creation of an address handle may wait until the kernel has resolved the peer's
//     Ethernet address on the network, which takes a second at most.
//   - The Close of a queue pair of siw waits up to 10 s for a peer that does not answer. It
//     holds no lock meanwhile that other objects need.
//
// Connections are made through rdma_cm(7) in the port space of TCP. Datagrams use the port
// space of UDP. Devices without datagrams (iWARP, siw) refuse them.
//
// # Path MTU
//
// The side that connects chooses the path MTU. rdma_cm takes the largest that fits the MTU
// of that side's network interface, up to 4096 bytes. [Config.PathMTU] lowers it. A side
// that accepts cannot lower it. Its operator sets the interface to the MTU of the network
// (ip link set dev ... mtu), which is best done on all machines alike. Some 100 bytes are
// for headers of RoCE. So an interface with an MTU of 1500 bytes carries 1024, and one with
// 4200 or more carries 4096. For datagrams only the port's MTU counts. iWARP has the
// segments of TCP.
package rdmacore

import "time"

// Name is the name of the provider. Its devices have other names.
const Name = "rdma"

// Config has settings for operators of RDMA networks. The zero value means the defaults of
// the device and of the connection manager.
type Config struct {
	// Device is the name of the only device to use, for instance "mlx5_0". If it is empty,
	// the route decides.
	Device string

	// TypeOfService is the IP type of service (RoCE: traffic class) of the connections
	// that this side makes. Switches choose the priority by it. See rdma_set_option(3),
	// RDMA_OPTION_ID_TOS. 0 means the system's default.
	TypeOfService uint8

	// AckTimeout is how long a RoCE or InfiniBand device waits for an acknowledgement
	// before it sends again. It is rounded up to 4.096 us times a power of two; see
	// RDMA_OPTION_ID_ACK_TIMEOUT. 0 means the default, which is 0.54 s on RoCE (Linux
	// 6.12). That is enough for networks that delay packets by tens of milliseconds. A
	// peer that is gone is given up after Retries + 1 times as long. InfiniBand volume 1,
	// section 9.7.6.1.3, allows devices four times as long. Each side has its own value. A
	// side that accepts and sets none uses the peer's.
	AckTimeout time.Duration

	// Retries is how often the device sends again before the connection fails, 1 to 7. 0
	// means 6, because Soft-RoCE never gives up with 7. The side that connects decides for
	// both.
	Retries int

	// RNRRetries is how often the peer is told to send again when this side has no receive
	// posted, 1 to 7. 7 means without end. 0 means 7, because the callers of this package
	// have flow control.
	RNRRetries int

	// PathMTU bounds how many bytes a packet carries, in either direction, on the
	// connections that this side makes: 256, 512, 1024, 2048 or 4096. It helps if the
	// peer's interface, or the network between, has a smaller MTU than this side's
	// interface. 0 leaves the choice to rdma_cm; see the package's comment. With it
	// Resolve takes about twice as long. iWARP and datagrams do not use it.
	PathMTU int

	// RNRTimer is how long a peer must wait before it sends again when this side has no
	// receive posted. It is rounded up to a value that devices know (0.01 ms to 655.36
	// ms). 0 means 0.64 ms. iWARP does not use it.
	RNRTimer time.Duration
}
