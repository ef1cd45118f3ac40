// Package rdmacore is the provider for real RDMA devices, and for those that
// Linux makes of a network interface (Soft-RoCE, siw): the verbs of package ibv
// on libibverbs and librdmacm.
//
// The two libraries are loaded at run time, on the first call of [New]; neither
// they nor their headers are needed to build, only cgo. Where cgo is off or the
// system is not Linux the package compiles all the same and New says why there
// are no devices.
//
// Completion and connection events are waited for by the Go runtime's poller, and
// a goroutine that waits holds no thread. C keeps no pointer to Go memory but the
// addresses of registered regions, which stay reachable until the MR is closed.
//
// Posting, polling, arming and taking events go to the libraries without telling the scheduler, as if
// they were Go functions: see internal/ccall. On siw a post sends, which takes as long as copying
// what is posted. The build tag rdmanet_cgocall has all of it go by cgo, which takes longer; so does a
// build with the race detector, or with a version of Go that this was not tested with.
//
// No call into C blocks, with one exception: siw connects inside the kernel, for
// as long as TCP tries (tcp_syn_retries, two minutes). Connect returns when its
// context ends all the same, but a queue pair that is closed then waits.
//
// Creating an address handle is another: the kernel may ask the network for the
// peer's Ethernet address, for a second at most.
//
// Connections are made through rdma_cm(7) in the port space of TCP, datagrams
// sent through that of UDP. Devices without datagrams (iWARP's, siw) refuse them.
//
// # Path MTU
//
// rdma_cm takes the path MTU from the side that connects: the largest that fits
// the MTU of its network interface, up to 4096 bytes. [Config.PathMTU] lowers it.
// A side that accepts cannot; its operator gives the interface the MTU that the
// network has (ip link set dev ... mtu), which is best done anyway and on all
// machines alike. RoCE is allowed some 100 bytes of headers besides, so that
// an interface's 1500 bytes carry 1024, and 4200 or more carry 4096. Datagrams follow
// the port alone, iWARP has TCP's segments.
package rdmacore

import "time"

// Name is the name of the provider; its devices have names of their own.
const Name = "rdma"

// Config holds what operators of RDMA networks adjust. The zero value leaves
// everything to the device's and the connection manager's defaults.
type Config struct {
	// Device keeps to the device of this name, "mlx5_0" for instance; empty
	// means whichever the route leads to.
	Device string

	// TypeOfService is the IP type of service (RoCE: traffic class) of the
	// connections that this side asks for, which switches choose the priority by; see
	// rdma_set_option(3), RDMA_OPTION_ID_TOS. 0 is the system's default.
	TypeOfService uint8

	// AckTimeout is how long a RoCE or InfiniBand device waits for an
	// acknowledgement before it sends again, rounded up to 4.096 us times a
	// power of two; see RDMA_OPTION_ID_ACK_TIMEOUT. 0 is the default: on RoCE
	// 0.54 s (Linux 6.12), which is enough for networks that delay packets by tens of
	// milliseconds. A peer that is gone is given up after Retries + 1 times as
	// much; InfiniBand volume 1, section 9.7.6.1.3, lets a device take four times
	// as long. Each side has its own; one that sets none and accepts takes the peer's.
	AckTimeout time.Duration

	// Retries is how often it sends again before the connection fails, 1 to 7;
	// 0 means 6, because Soft-RoCE takes 7 for ever. The side that connects decides
	// for both.
	Retries int

	// RNRRetries is how often the peer is told to send again when this side has no
	// receive posted, 1 to 7, where 7 is for ever; 0 means 7, as flow control is
	// done above.
	RNRRetries int

	// PathMTU bounds what one packet of the connections that this side asks for
	// carries, in either direction: 256, 512, 1024, 2048 or 4096 bytes. It helps
	// where the peer's interface or the network between has a smaller MTU than
	// this side's. 0 leaves it to rdma_cm; see the package's comment. Resolve
	// takes about twice as long. iWARP and datagrams have no such thing.
	PathMTU int

	// RNRTimer is how long a peer is told to wait before it sends again to this
	// side when no receive is posted, rounded up to what devices know (0.01 ms
	// to 655.36 ms). 0 is 0.64 ms. iWARP has no such thing.
	RNRTimer time.Duration
}
