package ibv

// A PD is a protection domain. Queue pairs, memory regions and address handles work
// together only within one domain. All methods may be called by several goroutines at once.
type PD interface {
	// RegMR registers buf, which must stay in place and reachable until the region is
	// closed. An empty buf is refused. access is what the peer and the device may do. A
	// region with [AccessRemoteWrite] needs [AccessLocalWrite] too, see ibv_reg_mr(3). If
	// the memory cannot be registered, the error matches syscall.ENOMEM. The peers of all
	// queue pairs in the domain may use the remote key. [QP.RegMR] makes a key for a
	// single peer.
	RegMR(buf []byte, access Access) (MR, error)

	// CreateAH creates the address handle for attr, which [ID.UDParam] has returned. It
	// may wait while the device looks for the next hop. Without [CapUD] the error matches
	// errors.ErrUnsupported.
	CreateAH(attr AHAttr) (AH, error)

	// CreateAHFromWC creates the address handle for an answer to the sender of a datagram.
	// wc is the completion of the datagram, grh is the header in front of it (see
	// [GRHLen]), and port is the port that it came by. The answer goes to the queue pair
	// [WC.SrcQP], usually with [QKeyUDP]. Otherwise it is like CreateAH.
	CreateAHFromWC(port int, wc *WC, grh []byte) (AH, error)

	// Close releases the domain. It fails with [ErrBusy] while a queue pair, a region or
	// an address handle is left.
	Close() error
}

// An MR is a registered memory region. All methods may be called by several
// goroutines at once.
type MR interface {
	// LKey is the key for the SGEs of this side.
	LKey() uint32

	// RKey is the key that the peer must name (iWARP: the STag). It opens nothing unless
	// the region's access has a remote right.
	RKey() uint32

	// Addr is the remote address (iWARP: the tagged offset) of the first byte.
	// It need not be the address in memory.
	Addr() uint64

	// Len is the length in bytes.
	Len() int

	// Close ends the registration. When it returns, no peer can read or write the memory
	// any more, and work requests that still name the region fail.
	Close() error
}

// Access has the rights to a region, after enum ibv_access_flags. Local reading is always
// allowed.
type Access uint32

// These are the access rights.
const (
	AccessLocalWrite   Access = 1 << iota // AccessLocalWrite: receives and RDMA Reads may fill the region.
	AccessRemoteWrite                     // AccessRemoteWrite: the peer may write by RDMA Write.
	AccessRemoteRead                      // AccessRemoteRead: the peer may read by RDMA Read.
	AccessRemoteAtomic                    // AccessRemoteAtomic: the peer may use atomic operations.
)

// SGE is a scatter/gather element: bytes in a registered region, and the region's local
// key. Inline sends do not need the key.
type SGE struct {
	Buf  []byte
	LKey uint32
}
