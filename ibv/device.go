package ibv

import (
	"context"
	"net/netip"
)

// A Provider is a family of devices that share one connection manager: rdma-core with all
// its devices, or the software device. All methods may be called by several goroutines at
// once.
type Provider interface {
	// Name is the provider's name in configurations, for instance "iwarp".
	Name() string

	// Attr returns the properties by which callers choose among providers. They never
	// change.
	Attr() ProviderAttr

	// Devices lists the devices that can be used now.
	Devices() ([]Device, error)

	// Resolve finds the device and the route to remote, and returns an ID for the active
	// side, as rdma_resolve_addr(3) and rdma_resolve_route(3) do. A valid local is the
	// source address; its port may be 0. If ctx ends first, the error is that of ctx.
	Resolve(ctx context.Context, local, remote netip.AddrPort) (ID, error)

	// Listen binds local. The port may be 0. The address may be unspecified, 0.0.0.0 or
	// ::, which means all addresses of that family. The zero netip.Addr means all
	// addresses of both families. backlog bounds the connections that wait for Accept; 0
	// means the provider's default. If the address is in use, the error matches
	// syscall.EADDRINUSE.
	Listen(ctx context.Context, local netip.AddrPort, backlog int) (Listener, error)

	// BindUD, ResolveUD and ListenUD do the same for datagrams, in the port space of UDP;
	// see [ID]. Without [CapUD] the error matches errors.ErrUnsupported.
	//
	// BindUD returns the ID of an address of this side, as rdma_bind_addr(3) does. The
	// address must be that of a device. The port may be 0.
	BindUD(ctx context.Context, local netip.AddrPort) (ID, error)
	ResolveUD(ctx context.Context, local, remote netip.AddrPort) (ID, error)
	ListenUD(ctx context.Context, local netip.AddrPort, backlog int) (Listener, error)
}

// ProviderAttr has the properties of a provider's devices that matter for the choice among
// providers. The zero value stands for RDMA devices.
type ProviderAttr struct {
	// TCPSockets is set when the connections are TCP connections that package net makes. A
	// host where nobody listens refuses them at once, but a host without RDMA devices does
	// not answer an RDMA connection request. Package net also calls the hooks of
	// net/http/httptrace in the context of Connect.
	TCPSockets bool

	// UDPSockets is set when datagrams go by UDP sockets, which callers open by package
	// net. BindUD, ResolveUD and ListenUD fail.
	UDPSockets bool
}

// A Device is an RDMA device. All methods may be called by several goroutines
// at once.
type Device interface {
	// Name is unique on the machine, for instance "rxe0" or "iwarp".
	Name() string

	// Attr returns the limits of the device, see ibv_query_device(3).
	Attr() DeviceAttr

	// Port returns the state of port n, counted from 1; see ibv_query_port(3).
	Port(n int) (PortAttr, error)

	// AllocPD allocates a protection domain.
	AllocPD() (PD, error)

	// CreateCQ creates a completion queue for at least depth completions. If depth is
	// above [DeviceAttr.MaxCQE], the error matches [ErrLimit].
	CreateCQ(depth int) (CQ, error)
}

// Transport is the protocol of a device on the wire.
type Transport uint8

// These are the transports that ibv_query_device(3) and ibv_query_port(3) distinguish.
const (
	TransportUnknown Transport = iota
	TransportIWARP
	TransportIB
	TransportRoCE
)

// String returns "iWARP", "InfiniBand", "RoCE" or "unknown".
func (t Transport) String() string {
	switch t {
	case TransportIWARP:
		return "iWARP"
	case TransportIB:
		return "InfiniBand"
	case TransportRoCE:
		return "RoCE"
	}
	return "unknown"
}

// Caps are the optional operations of a device, and properties that save work of the
// callers.
type Caps uint32

// These are the optional operations and properties.
const (
	CapSendInvalidate  Caps = 1 << iota // CapSendInvalidate: the device has [OpSendInv].
	CapSendImm                          // CapSendImm: the device has [OpSendImm].
	CapWriteImm                         // CapWriteImm: the device has [OpWriteImm].
	CapAtomic                           // CapAtomic: the device has [OpCmpSwap] and [OpFetchAdd].
	CapLocalInvalidate                  // CapLocalInvalidate: the device has [OpLocalInv].
	CapUD                               // CapUD: the device has queue pairs for datagrams.
	CapSolicited                        // CapSolicited: [CQ.Arm] can wait for solicited completions only.
	CapQPRegion                         // CapQPRegion: the device has [QP.RegMR].
	CapMulticast                        // CapMulticast: the device has [ID.JoinMulticast] and [QP.AttachMcast].

	// CapOnDemandPaging is the property that registration pins no memory, as
	// IBV_ACCESS_ON_DEMAND requests. A region takes memory only where it is used, and does
	// not count against RLIMIT_MEMLOCK. It gives pages back while nothing is posted there.
	// Other devices keep a region resident as long as it is registered, as the verbs
	// specify. So pinning is no quirk.
	CapOnDemandPaging

	// CapWaitReceives is the property that the goroutine in [CQ.Wait] receives data
	// itself, in the system call in which it sleeps. The completion queue then serves one
	// queue pair. Polling before such a wait saves nothing. Other devices wake the
	// goroutine by an event, which takes longer than most answers.
	CapWaitReceives

	// CapEmptyReads is the property that the device at the other end of a connection,
	// whatever it is, answers RDMA Reads of zero bytes correctly. Over iWARP the other
	// device may have [Quirks.EmptyReadsGarbled], and the connection set-up does not show
	// that.
	CapEmptyReads

	// CapTCPPorts is the property that listeners use the ports of the host's TCP. Such a
	// listener gets the connections of all iWARP peers at its port. Two such devices
	// cannot both listen on a port, and need not.
	CapTCPPorts

	// CapHoldSends is the property that a Send may wait for a receive of the peer's: the device
	// has QPInit.HoldSends, and tells by [HostProber] whether the peer's host is there.
	CapHoldSends
)

// Has reports whether c has all bits of want.
func (c Caps) Has(want Caps) bool { return c&want == want }

// DeviceAttr has the limits of a device, after struct ibv_device_attr. A limit of 0 means
// that the device has none of the thing, unless a comment says otherwise.
type DeviceAttr struct {
	Transport Transport
	Caps      Caps
	FWVersion string // FWVersion is the version of the firmware, empty if there is none.
	NodeGUID  uint64
	Ports     int

	MaxQP           int // MaxQP is the number of queue pairs.
	MaxQPWR         int // MaxQPWR is the number of work requests in a queue.
	MaxSGE          int // MaxSGE is the number of scatter/gather elements in a work request.
	MaxSGERead      int // MaxSGERead is the number of scatter/gather elements of [OpRead].
	MaxInline       int // MaxInline is the number of bytes of an inline send.
	MaxCQ           int
	MaxCQE          int // MaxCQE is the number of completions in a completion queue.
	MaxMR           int
	MaxPD           int
	MaxMRSize       uint64 // MaxMRSize is the number of bytes of a memory region.
	MaxMessageSize  uint64 // MaxMessageSize is the number of bytes of a send, write or read.
	MaxQPRdAtom     int    // MaxQPRdAtom is how many RDMA Reads a queue pair serves at a time (IRD).
	MaxQPInitRdAtom int    // MaxQPInitRdAtom is how many RDMA Reads a queue pair has outstanding (ORD).
	MaxPrivateData  int    // MaxPrivateData is the number of bytes of [ConnParam.Private].

	// These are the limits of datagrams, 0 without [CapUD].
	MaxAH            int // MaxAH is the number of address handles.
	MaxInlineUD      int // MaxInlineUD is the number of bytes of an inline datagram.
	MaxPrivateDataUD int // MaxPrivateDataUD is the number of bytes of [ConnParam.Private].

	// These are the limits of multicast, 0 without [CapMulticast].
	MaxMcastGrp      int // MaxMcastGrp is the number of groups.
	MaxMcastQPAttach int // MaxMcastQPAttach is the number of queue pairs in a group.

	Quirks Quirks // Quirks has the rules of this package that the device breaks.
}

// Quirks has the rules of this package that a device breaks. A device that keeps all rules
// has the zero value. A property that breaks no rule is no quirk: it is in [Caps].
type Quirks struct {
	// ReadsOutOfOrder is set when an RDMA Read may complete after requests that were
	// posted later, unless these have [SendFence]. The rule is that requests complete in
	// the order in which they were posted.
	ReadsOutOfOrder bool

	// ReadsStall is set when a request that waits for RDMA Reads of this side also delays
	// the answers to the peer's Reads. A request waits because of [SendFence], or because
	// as many Reads as [ConnParam.InitiatorDepth] are outstanding. If both ends do that at
	// once, they wait for each other for ever. So if two peers read from each other, one
	// of them must do neither. The rule is that nothing delays the answers.
	ReadsStall bool

	// SendsBuffered is set when a send may complete before the peer's device has it, so
	// that a Disconnect right behind it may lose it. When an RDMA Read completes, for
	// instance one of zero bytes, the peer's device has everything that was posted before
	// the Read. The buffer of a send without [SendSignaled] and [SendInline] may be in use
	// even after later sends have completed. The rule is that a Disconnect loses only what
	// has not completed, and that a completion gives back the buffers of all requests
	// before it.
	SendsBuffered bool

	// EmptyReadsGarbled is set when the device may answer an RDMA Read of zero bytes with
	// bytes that it has sent before, if it is sending at that moment. That breaks the
	// connection. The rule is that every RDMA Read gets the bytes that it names.
	EmptyReadsGarbled bool

	// ReadsUnchecked is set when the device lets the peer of a connection read
	// every region of the queue pair's domain. The rule is that the peer reads
	// regions with [AccessRemoteRead] only.
	ReadsUnchecked bool

	// VagueErrors is set when the status of a request that fails on this side may not give
	// the cause. A request that names memory that it must not use may end with
	// [WCFlushErr], [WCLocQPOpErr] or, for a receive, [WCGeneralErr]; the rule is
	// [WCLocProtErr]. A request of the send queue that meets the end of the connection may
	// end with WCLocQPOpErr; the rule is WCFlushErr. A Connect that meets the end of the
	// listener may time out.
	VagueErrors bool
}

// PortState is the link's state, after enum ibv_port_state.
type PortState uint8

// The port states that matter to a program.
const (
	PortDown PortState = iota
	PortInit
	PortArmed
	PortActive
)

// String returns the state's name in lower case.
func (s PortState) String() string {
	switch s {
	case PortDown:
		return "down"
	case PortInit:
		return "init"
	case PortArmed:
		return "armed"
	case PortActive:
		return "active"
	}
	return "unknown"
}

// PortAttr describes one port of a device.
type PortAttr struct {
	State     PortState
	ActiveMTU int    // ActiveMTU is in bytes. No datagram is longer.
	GIDs      []GID  // GIDs is the port's table, without empty entries.
	NetDev    string // NetDev is the network interface of the port, empty if there is none.
}

// GID is a port's 16-byte address. For IPv4 it holds the mapped form
// ::ffff:a.b.c.d.
type GID [16]byte

// String returns the GID in IPv6 notation.
func (g GID) String() string { return netip.AddrFrom16(g).String() }

// GIDFromAddr returns the GID that stands for an IP address.
func GIDFromAddr(a netip.Addr) GID { return GID(a.As16()) }
