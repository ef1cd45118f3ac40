package ibv

// A PD is a protection domain: queue pairs, memory regions and address
// handles work together only within one. All methods may be called by several goroutines at once.
type PD interface {
	// RegMR registers buf, which must stay in place and reachable until the
	// region is closed. An empty buf is refused. What access the peer and the
	// device get is said by access; a region with [AccessRemoteWrite] needs
	// [AccessLocalWrite] too, as ibv_reg_mr(3) has it. Memory that cannot be
	// registered matches syscall.ENOMEM. The peers of all queue pairs in the domain
	// may use the remote key; [QP.RegMR] makes one for a single peer.
	RegMR(buf []byte, access Access) (MR, error)

	// CreateAH creates the handle for a way that [ID.UDParam] has told. It may
	// wait while the device looks for the next hop. Devices without [CapUD]
	// return an error that matches errors.ErrUnsupported.
	CreateAH(attr AHAttr) (AH, error)

	// CreateAHFromWC creates the handle for an answer to the sender of a
	// datagram, from its completion, the header in front of it (see [GRHLen])
	// and the port that it came in by. The peer is reached with [WC.SrcQP] and,
	// as a rule, [QKeyUDP]. Otherwise as CreateAH.
	CreateAHFromWC(port int, wc *WC, grh []byte) (AH, error)

	// Close releases the domain, or fails with [ErrBusy] while a queue pair,
	// a region or an address handle is left.
	Close() error
}

// An MR is a registered memory region. All methods may be called by several
// goroutines at once.
type MR interface {
	// LKey is the key for the SGEs of this side.
	LKey() uint32

	// RKey is the key that the peer must name (iWARP: the STag). It opens
	// nothing without a remote right in the region's access.
	RKey() uint32

	// Addr is the remote address (iWARP: the tagged offset) of the first byte.
	// It need not be the address in memory.
	Addr() uint64

	// Len is the length in bytes.
	Len() int

	// Close takes the region back. When it returns no peer can read or write
	// the memory any more; work requests that still name it fail.
	Close() error
}

// Access says who may do what with a region, after enum ibv_access_flags.
// Local reading is always allowed.
type Access uint32

// The access rights.
const (
	AccessLocalWrite   Access = 1 << iota // receives and RDMA Read results may land here
	AccessRemoteWrite                     // the peer may RDMA Write
	AccessRemoteRead                      // the peer may RDMA Read
	AccessRemoteAtomic                    // the peer may do atomics
)

// SGE is a scatter/gather element: bytes inside a registered region, and the
// region's local key. The key is not looked at for inline sends.
type SGE struct {
	Buf  []byte
	LKey uint32
}
