package ibv

import (
	"context"
	"net/netip"
)

// A Provider is a family of devices that share one connection manager:
// rdma-core with all its devices, or the software device. All methods may be
// called by several goroutines at once.
type Provider interface {
	// Name is what users call the provider, "iwarp" for instance.
	Name() string

	// Attr says what must be known before a device is chosen. It never changes.
	Attr() ProviderAttr

	// Devices lists the devices that can be used now.
	Devices() ([]Device, error)

	// Resolve finds the device and the route to remote and returns an ID for
	// the active side, as rdma_resolve_addr(3) and rdma_resolve_route(3) do.
	// A valid local pins the source address; its port may be 0. The error is
	// ctx's own when ctx ends first.
	Resolve(ctx context.Context, local, remote netip.AddrPort) (ID, error)

	// Listen binds local, whose port may be 0 and whose address may be
	// unspecified, 0.0.0.0 or ::, for all of its family; the zero netip.Addr
	// stands for all addresses of both families. backlog bounds the connections that wait for Accept; 0 means
	// the provider's default. An address in use matches syscall.EADDRINUSE.
	Listen(ctx context.Context, local netip.AddrPort, backlog int) (Listener, error)

	// BindUD, ResolveUD and ListenUD do the like in the port space of UDP, for
	// datagrams; see [ID]. A device that lacks [CapUD] is refused with an error
	// that matches errors.ErrUnsupported.
	//
	// BindUD returns the ID of this side's address alone, which must be that of a
	// device, as rdma_bind_addr(3) does. The port may be 0.
	BindUD(ctx context.Context, local netip.AddrPort) (ID, error)
	ResolveUD(ctx context.Context, local, remote netip.AddrPort) (ID, error)
	ListenUD(ctx context.Context, local netip.AddrPort, backlog int) (Listener, error)
}

// ProviderAttr says in what the devices of a provider differ from RDMA devices for those
// that choose among providers. The zero value is that of RDMA devices.
type ProviderAttr struct {
	// TCPSockets is set when the connections are TCP connections that package net
	// makes. A host where nobody listens refuses them at once, while one that has no
	// RDMA device does not answer. And package net calls the hooks of
	// net/http/httptrace that the context of Connect has.
	TCPSockets bool

	// UDPSockets is set when the datagrams are those of UDP sockets, which callers
	// open by package net. BindUD, ResolveUD and ListenUD are refused.
	UDPSockets bool
}

// A Device is an RDMA device. All methods may be called by several goroutines
// at once.
type Device interface {
	// Name is unique on the machine, "rxe0" or "iwarp" for instance.
	Name() string

	// Attr returns the limits of the device; see ibv_query_device(3).
	Attr() DeviceAttr

	// Port returns the state of port n, counted from 1; see ibv_query_port(3).
	Port(n int) (PortAttr, error)

	// AllocPD allocates a protection domain.
	AllocPD() (PD, error)

	// CreateCQ creates a completion queue for at least depth completions.
	// More than [DeviceAttr.MaxCQE] matches [ErrLimit].
	CreateCQ(depth int) (CQ, error)
}

// Transport is what a device speaks on the wire.
type Transport uint8

// The transports, as ibv_query_device(3) and ibv_query_port(3) tell them apart.
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

// Caps says what a device can do beyond what every device can: optional operations, and
// properties that save its callers something.
type Caps uint32

// The optional operations and properties.
const (
	CapSendInvalidate  Caps = 1 << iota // [OpSendInv]
	CapSendImm                          // [OpSendImm]
	CapWriteImm                         // [OpWriteImm]
	CapAtomic                           // [OpCmpSwap], [OpFetchAdd]
	CapLocalInvalidate                  // [OpLocalInv]
	CapUD                               // datagram queue pairs
	CapSolicited                        // [CQ.Arm] for solicited completions only
	CapQPRegion                         // [QP.RegMR]
	CapMulticast                        // [ID.JoinMulticast], [QP.AttachMcast]

	// CapOnDemandPaging is the property that registration pins no memory, as
	// IBV_ACCESS_ON_DEMAND asks for: a region takes memory only where it is used,
	// does not count against RLIMIT_MEMLOCK, and gives pages back while nothing is
	// posted there. Other devices keep a region resident as long as it is
	// registered, as the verbs say; so pinning is no quirk.
	CapOnDemandPaging

	// CapWaitReceives is the property that a goroutine in [CQ.Wait] itself receives
	// for the one queue pair that the completion queue serves, in the system call
	// that it sleeps in. Polling before such a wait saves nothing. Other devices wake
	// the goroutine by an event, which takes longer than most answers take.
	CapWaitReceives

	// CapEmptyReads is the property that whatever device is at the other end of a
	// connection answers an RDMA Read of no bytes by the rules. Over iWARP the other
	// device may have [Quirks.EmptyReadsGarbled], and connection set-up does not tell.
	CapEmptyReads

	// CapTCPPorts is the property that a listener takes its port from those of the
	// host's TCP, and gets the connections of all iWARP peers there. Two such devices
	// cannot both listen on a port, and need not.
	CapTCPPorts
)

// Has reports whether all of want is there.
func (c Caps) Has(want Caps) bool { return c&want == want }

// DeviceAttr holds the limits of a device, after struct ibv_device_attr. A
// limit of 0 means that the device has none of the thing, except where a
// comment says otherwise.
type DeviceAttr struct {
	Transport Transport
	Caps      Caps
	FWVersion string // empty where the device has none
	NodeGUID  uint64
	Ports     int

	MaxQP           int // queue pairs
	MaxQPWR         int // work requests a queue
	MaxSGE          int // scatter/gather elements a work request
	MaxSGERead      int // the same for [OpRead]
	MaxInline       int // bytes of an inline send
	MaxCQ           int
	MaxCQE          int // completions a completion queue
	MaxMR           int
	MaxPD           int
	MaxMRSize       uint64 // bytes of one memory region
	MaxMessageSize  uint64 // bytes of one send, write or read
	MaxQPRdAtom     int    // RDMA Reads a queue pair serves at a time (IRD)
	MaxQPInitRdAtom int    // RDMA Reads a queue pair has outstanding (ORD)
	MaxPrivateData  int    // consumer's bytes in [ConnParam]

	// Of datagrams, 0 without [CapUD].
	MaxAH            int // address handles
	MaxInlineUD      int // bytes of an inline datagram
	MaxPrivateDataUD int // as MaxPrivateData

	// Of multicast, 0 without [CapMulticast].
	MaxMcastGrp      int // groups
	MaxMcastQPAttach int // queue pairs a group

	Quirks Quirks // how the device breaks the rules of this package
}

// Quirks says in what ways a device breaks the rules of this package. A device that keeps
// them all has the zero value. A property that breaks no rule is no quirk: it is in [Caps].
type Quirks struct {
	// ReadsOutOfOrder is set when an RDMA Read may complete after requests that
	// were posted behind it, unless they have [SendFence]. The rule is that
	// requests complete in the order they were posted.
	ReadsOutOfOrder bool

	// ReadsStall is set when a request that waits for RDMA Reads of this side,
	// for its [SendFence] or because as many as [ConnParam.InitiatorDepth] are
	// outstanding, holds up the answers to the peer's Reads too. When both ends
	// come to that at once they wait for each other for ever, so of two peers
	// that read from each other one must do neither. The rule is that nothing
	// holds up the answers.
	ReadsStall bool

	// SendsBuffered is set when a send completes before the peer's device has
	// it, so that a Disconnect right behind may lose it. An RDMA Read, of no
	// bytes for instance, that completes shows that the peer's device has all
	// that was posted before. The buffer of a send without [SendSignaled] and
	// [SendInline] may be in use even after later ones have completed. The rule
	// is that a Disconnect loses only what has not completed, and that a
	// completion gives back the buffers of all requests before it.
	SendsBuffered bool

	// EmptyReadsGarbled is set when the device may answer an RDMA Read of no bytes
	// with some that it has sent before, if it is sending at that moment; which
	// breaks the connection. The rule is that every RDMA Read gets the bytes that
	// it names.
	EmptyReadsGarbled bool

	// ReadsUnchecked is set when the device lets the peer of a connection read
	// every region of the queue pair's domain. The rule is that the peer reads
	// regions with [AccessRemoteRead] only.
	ReadsUnchecked bool

	// VagueErrors is set when the status of a request that fails on this side may
	// not say why. One that names memory it must not use may end with
	// [WCFlushErr], [WCLocQPOpErr] or, a receive, [WCGeneralErr]; the rule is
	// [WCLocProtErr]. A send-queue request that meets the end of the connection
	// may end with WCLocQPOpErr; the rule is WCFlushErr. And a Connect that meets
	// the end of the listener may time out.
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
	ActiveMTU int    // bytes; no datagram is longer
	GIDs      []GID  // the port's table, empty entries left out
	NetDev    string // the network interface behind it, empty if there is none
}

// GID is a port's 16-byte address. For IPv4 it holds the mapped form
// ::ffff:a.b.c.d.
type GID [16]byte

// String returns the GID in IPv6 notation.
func (g GID) String() string { return netip.AddrFrom16(g).String() }

// GIDFromAddr returns the GID that stands for an IP address.
func GIDFromAddr(a netip.Addr) GID { return GID(a.As16()) }
