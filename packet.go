package rdmanet

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/udconn"
)

// ListenPacket opens a connection for datagrams at the local address. network is "udp",
// "udp4" (IPv4 only) or "udp6" (IPv6 only); "rdma", "rdma4" and "rdma6" mean the same here.
// address is host:port. An empty host means every address, and port 0 a free port. The
// result is a *PacketConn.
//
// It uses the RDMA device that has the address, if that device has datagrams (siw has
// none), and also the software device: see [PacketConn].
func ListenPacket(network, address string) (net.PacketConn, error) {
	return new(ListenConfig).ListenPacket(context.Background(), network, address)
}

// ListenPacket opens a connection for datagrams; see the function ListenPacket. ctx bounds
// the opening only. Backlog is not used.
func (lc *ListenConfig) ListenPacket(ctx context.Context, network, address string) (net.PacketConn, error) {
	c, addr, err := lc.listenPacket(ctx, network, address)
	if err != nil {
		return nil, opError("listen", nil, addr, dialError(err))
	}
	return newPacketConn(&lc.Config, c), nil
}

// ListenMulticast opens a connection that receives an IP multicast group at the port of
// gaddr, as net.ListenMulticastUDP does. network is as in ListenPacket. ifi is the
// interface. nil leaves the choice to the system's routes, which is not recommended.
//
// The connection listens on every address, and several connections may listen on the same
// port in this way. A datagram to one address and that port, an answer for instance,
// reaches one of them: over UDP the one that was opened last, over RDMA devices the first
// one. The connection sends to groups by ifi. It does not receive its own datagrams until
// SetMulticastLoopback allows that. [PacketConn.JoinGroup] joins more groups.
func ListenMulticast(network string, ifi *net.Interface, gaddr *net.UDPAddr) (*PacketConn, error) {
	return new(ListenConfig).ListenMulticast(context.Background(), network, ifi, gaddr)
}

// ListenMulticast opens a connection that receives a group; see the function
// ListenMulticast. ctx bounds the opening only. Backlog is not used.
func (lc *ListenConfig) ListenMulticast(ctx context.Context, network string, ifi *net.Interface, gaddr *net.UDPAddr) (*PacketConn, error) {
	c, err := lc.listenMulticast(ctx, network, ifi, gaddr)
	if err != nil {
		var addr net.Addr
		if gaddr != nil {
			addr = gaddr
		}
		return nil, opError("listen", nil, addr, dialError(err))
	}
	return newPacketConn(&lc.Config, c), nil
}

// PacketConn sends and receives datagrams. It implements net.PacketConn. If Dial has made
// it, it is connected to one peer and implements net.Conn. All methods may be called by
// several goroutines at once.
//
// Over an RDMA device each datagram is one Send of a UD queue pair. rdma_cm's port space of
// UDP finds the queue pair that serves an address. Over the software device each datagram
// is one UDP datagram, so the peer may be any program that uses UDP. A connection that was
// opened with neither Config.Device nor Config.RequireRDMA has both, on the same port. It
// receives by both. It sends to a peer by the RDMA device if the peer answers there, and
// otherwise by the software device.
//
// Datagrams may be lost, doubled and late. Datagrams to one peer leave in the order in
// which they were written. They are never fragmented: if a datagram is longer than
// [PacketConn.MaxDatagramSize], the error matches syscall.EMSGSIZE. Empty datagrams are
// legal. A datagram that finds the reader's buffer full is dropped and counted.
//
// [ListenMulticast] and [PacketConn.JoinGroup] receive IP multicast groups. A group is
// written to as any address is. A connection with both devices receives groups by both, and
// writes to them by UDP, which reaches every member that has UDP. Members with an RDMA
// device alone form a group of their own. Broadcast works with the software device. With an
// RDMA device alone it fails with an error that matches errors.ErrUnsupported.
//
// A method uses the buffer that it is given only until the call returns.
//
// Before the first datagram to an address leaves by an RDMA device, the address must be
// resolved. Calls do not wait for that: a few datagrams are kept, and the call that wrote
// them returns at once. If nobody serves the address, the next write to it fails with
// ECONNREFUSED or a timeout. If the peer is silent for a while, the address is resolved
// again, so that a peer that was started anew is found.
//
// A PacketConn that the program drops without Close is closed when the garbage collector
// finds it. Config.Logger receives a warning, or slog.Default() if that is nil.
type PacketConn struct {
	conn *udconn.Conn
}

// ReadFrom waits for a datagram and copies it into b. What does not fit is lost, as with
// UDP. addr is a *net.UDPAddr. The error matches os.ErrDeadlineExceeded or net.ErrClosed.
func (p *PacketConn) ReadFrom(b []byte) (n int, addr net.Addr, err error) {
	n, from, err := p.conn.Read(b)
	runtime.KeepAlive(p)
	if err != nil {
		return 0, nil, p.opError("read", err)
	}
	return n, udpAddr(from), nil
}

// ReadFromUDPAddrPort is ReadFrom without an allocation. An IPv4 address in addr has four
// bytes.
func (p *PacketConn) ReadFromUDPAddrPort(b []byte) (n int, addr netip.AddrPort, err error) {
	n, addr, err = p.conn.Read(b)
	runtime.KeepAlive(p)
	return n, addr, p.opError("read", err)
}

// Read is ReadFrom without the address, for a connected PacketConn.
func (p *PacketConn) Read(b []byte) (int, error) {
	n, _, err := p.conn.Read(b)
	runtime.KeepAlive(p)
	return n, p.opError("read", err)
}

// WriteTo sends b to addr, a *net.UDPAddr. The error matches
//
//   - syscall.EMSGSIZE for more than [PacketConn.MaxDatagramSize] bytes,
//   - os.ErrDeadlineExceeded at the deadline, while the device is busy,
//   - net.ErrClosed after Close,
//   - syscall.ECONNREFUSED, or is a timeout, if nobody has answered for the address before,
//   - net.ErrWriteToConnected if the PacketConn is connected,
//   - syscall.EAFNOSUPPORT if the PacketConn is not open for addr's family.
func (p *PacketConn) WriteTo(b []byte, addr net.Addr) (int, error) {
	ua, ok := addr.(*net.UDPAddr)
	switch {
	case ok && ua != nil && isPort(ua.Port):
		return p.WriteToUDPAddrPort(b, ua.AddrPort())
	case ok && ua == nil:
		addr = nil
	}
	return 0, opError("write", p.LocalAddr(), addr, syscall.EINVAL)
}

// WriteToUDPAddrPort is WriteTo without an allocation.
func (p *PacketConn) WriteToUDPAddrPort(b []byte, addr netip.AddrPort) (int, error) {
	to := udconn.Normal(addr)
	err := net.ErrWriteToConnected
	if !p.conn.Connected() {
		err = p.conn.Write(b, to)
	}
	runtime.KeepAlive(p)
	if err != nil {
		return 0, opError("write", p.LocalAddr(), udpAddr(to), err)
	}
	return len(b), nil
}

// Write is WriteTo for a connected PacketConn. Otherwise the error matches
// syscall.EDESTADDRREQ.
func (p *PacketConn) Write(b []byte) (int, error) {
	var err error = errno.EDESTADDRREQ
	if p.conn.Connected() {
		err = p.conn.WritePeer(b)
	}
	runtime.KeepAlive(p)
	if err != nil {
		return 0, p.opError("write", err)
	}
	return len(b), nil
}

// LocalAddr returns the local address, a *net.UDPAddr with the port that was chosen.
func (p *PacketConn) LocalAddr() net.Addr { return p.conn.LocalAddr() }

// RemoteAddr returns the peer of a connected PacketConn, a *net.UDPAddr, and otherwise nil.
func (p *PacketConn) RemoteAddr() net.Addr {
	if addr := p.conn.RemoteAddr(); addr != nil {
		return addr
	}
	return nil
}

// MaxDatagramSize returns how many bytes a datagram may have. It is the least size of all
// devices and interfaces that the local address may send by. RDMA devices carry 256 to 4096
// bytes, depending on the MTU of their network.
func (p *PacketConn) MaxDatagramSize() int { return p.conn.Limit() }

// SetDeadline bounds calls that read or write, also those in progress. A zero t means no
// deadline.
func (p *PacketConn) SetDeadline(t time.Time) error {
	if err := p.SetReadDeadline(t); err != nil {
		return err
	}
	return p.SetWriteDeadline(t)
}

// SetReadDeadline is SetDeadline for reading.
func (p *PacketConn) SetReadDeadline(t time.Time) error {
	return p.opError("set", p.conn.SetReadDeadline(t))
}

// SetWriteDeadline is SetDeadline for writing.
func (p *PacketConn) SetWriteDeadline(t time.Time) error {
	return p.opError("set", p.conn.SetWriteDeadline(t))
}

// SetReadBuffer sets how many bytes of datagrams may wait for the reader. Each datagram
// counts 128 bytes more than it has. At first the limit is 256 KiB, and at most it is 1
// GiB. One datagram always has room. What an RDMA device itself holds does not count.
func (p *PacketConn) SetReadBuffer(bytes int) error {
	return p.opError("set", p.conn.SetReadBuffer(bytes))
}

// SetWriteBuffer sets the size of the socket's buffer of the software device. The length of
// an RDMA device's send queue does not change.
func (p *PacketConn) SetWriteBuffer(bytes int) error {
	return p.opError("set", p.conn.SetWriteBuffer(bytes))
}

// Close ends the connection. Datagrams that a device already has are sent, within
// Config.LingerTimeout. Datagrams that wait for an address to be resolved are dropped.
func (p *PacketConn) Close() error {
	err := p.conn.Close()
	runtime.KeepAlive(p)
	return p.opError("close", err)
}

// Stats returns the present values of the counters.
func (p *PacketConn) Stats() PacketStats { return PacketStats(p.conn.Stats()) }

// Info describes the queue pairs and the UDP socket that are open, RDMA devices first. If
// the connection was opened for every address, it opens a device when the first peer needs
// it.
func (p *PacketConn) Info() []PacketInfo {
	var infos []PacketInfo
	for _, info := range p.conn.Info() {
		infos = append(infos, PacketInfo(info))
	}
	return infos
}

// ReadBatch waits for a datagram, and reads it and the datagrams behind it that have
// arrived, at most len(ds). It returns how many, and sets N and Addr of these. What does
// not fit into a Buf is lost, as in ReadFrom. The errors are those of ReadFrom. If ds is
// empty, ReadBatch returns at once.
//
// It allocates nothing.
func (p *PacketConn) ReadBatch(ds []Datagram) (n int, err error) {
	n, err = p.conn.ReadBatch(asEngine(ds))
	runtime.KeepAlive(p)
	return n, p.opError("read", err)
}

// WriteBatch sends datagrams in the order of ds, each as WriteTo does. It hands up to 32
// datagrams at a time to an RDMA device, which costs less than as many calls. If the
// PacketConn is connected, Addr may be zero, or the peer's address.
//
// WriteBatch returns how many were written. If that is less than len(ds), err is the error
// of the next one, as WriteTo returns it, or Write for a connected PacketConn. The
// datagrams behind it may be written by another call.
//
// While an address is being resolved, a limited number of datagrams wait for it, whether
// they come in a batch or by single calls. The others are dropped. They count as written,
// and PacketStats.Unsent counts them.
//
// It allocates nothing.
func (p *PacketConn) WriteBatch(ds []Datagram) (n int, err error) {
	batch := asEngine(ds)
	n, err = p.conn.WriteBatch(batch)
	runtime.KeepAlive(p)
	if err != nil {
		return n, opError("write", p.LocalAddr(), udpAddr(p.conn.Target(&batch[n])), err)
	}
	return n, nil
}

// JoinGroup joins an IP multicast group by an interface. group is a *net.UDPAddr, whose
// port is not used, or a *net.IPAddr. With a nil interface the system chooses one. From
// then on the connection reads what anybody sends to the group and the connection's port,
// with the sender's address. With the software device the connection must be open on every
// address. Close leaves all groups.
//
// The error matches syscall.EADDRINUSE if the group was joined by the interface already,
// and syscall.ENOBUFS for too many groups (64; Linux allows a UDP socket 20 unless
// net.ipv4.igmp_max_memberships says more). It matches syscall.EADDRNOTAVAIL if there is no
// interface or device to join by, and errors.ErrUnsupported if no device has groups of the
// address's family.
func (p *PacketConn) JoinGroup(ifi *net.Interface, group net.Addr) error {
	return p.changeGroups("join", ifi, group, p.conn.JoinGroup)
}

// LeaveGroup leaves a group that was joined by the interface. Datagrams that came before
// may still be read. If the group was not joined, the error matches syscall.EADDRNOTAVAIL.
func (p *PacketConn) LeaveGroup(ifi *net.Interface, group net.Addr) error {
	return p.changeGroups("leave", ifi, group, p.conn.LeaveGroup)
}

// SetMulticastLoopback sets whether datagrams come back that this connection sends to a
// group that it is a member of. At first they do, unless ListenMulticast has opened the
// connection. Over the software device the setting holds for all members on this host
// (IP_MULTICAST_LOOP), but not for the loopback interface, where everything comes back. An
// RDMA device delivers datagrams to all members, and the connection drops its own
// (PacketStats.Looped).
func (p *PacketConn) SetMulticastLoopback(on bool) error {
	return p.opError("set", p.conn.SetMulticastLoopback(on))
}

// SetMulticastInterface sets the interface by which datagrams to groups leave. With nil, as
// at first, the system's routes decide.
func (p *PacketConn) SetMulticastInterface(ifi *net.Interface) error {
	return p.opError("set", p.conn.SetMulticastInterface(ifi))
}

// Datagram is an element of the batches of [PacketConn.ReadBatch] and
// [PacketConn.WriteBatch].
type Datagram struct {
	Buf []byte // Buf is what is sent, or the memory for a datagram that is received.

	// N is how many bytes of Buf were received. WriteBatch sends all of Buf and does not
	// use N.
	N int

	// Addr is the destination, or the source of a datagram that was received. The source
	// has four bytes if it is an IPv4 address.
	Addr netip.AddrPort
}

// PacketStats counts what a PacketConn has done since it was opened.
type PacketStats struct {
	DatagramsSent     uint64 // DatagramsSent counts datagrams that were written without an error.
	DatagramsReceived uint64 // DatagramsReceived counts datagrams that were read.
	BytesSent         uint64 // BytesSent and BytesReceived count payload.
	BytesReceived     uint64

	// Overruns counts datagrams that were dropped on arrival because the reader lagged
	// behind. Strays counts those that were dropped for other reasons: the sender is
	// unknown, or is not the peer of a connected PacketConn, or the datagram was for
	// another port of a group. An RDMA device itself drops datagrams with a wrong key, and
	// datagrams that arrive while no receive is posted. These are not counted. The latter
	// happens only with more datagrams than Receives and the reader's buffer hold.
	Overruns uint64
	Strays   uint64

	// Looped counts own datagrams to a group that came back from an RDMA device and were
	// not wanted; see SetMulticastLoopback.
	Looped uint64

	// Unsent counts datagrams that were written and then dropped: too many waited for an
	// address to be resolved, or the resolution failed.
	Unsent uint64

	// These are for RDMA devices. Resolutions counts the resolutions of addresses, and
	// ResolutionFailures those that failed. QueueStalls counts how often a write had to
	// wait for the send queue.
	Resolutions        uint64
	ResolutionFailures uint64
	QueueStalls        uint64

	Peers    int // Peers is how many addresses are known.
	Receives int // Receives is how many datagrams RDMA devices have room for.
}

// PacketInfo describes a queue pair or the UDP socket of a PacketConn.
type PacketInfo struct {
	Device    string // Device is the name of the device, "iwarp" for the software device.
	Transport string // Transport is for instance "UDP" or "RoCE".
	Port      int    // Port is the port of the device, counted from 1.
	QPN       uint32 // QPN is the queue pair number, 0 over the software device.
	MTU       int    // MTU is how many bytes a datagram may have.
}

var _ interface {
	net.PacketConn
	net.Conn
} = (*PacketConn)(nil)

// newPacketConn returns the handle of a connection that the program has opened; see
// dropped.go.
func newPacketConn(cfg *Config, c *udconn.Conn) *PacketConn {
	p := &PacketConn{c}
	runtime.AddCleanup(p, func(log *slog.Logger) { packetDropped(log, c) }, cfg.Logger)
	return p
}

// packetDropped closes a connection whose handle is garbage.
func packetDropped(log *slog.Logger, c *udconn.Conn) {
	if !c.Closed() {
		go func() {
			warnDropped(log, "packet connection", "local", net.Addr(c.LocalAddr()))
			c.Close()
		}()
	}
}

// opError returns the error of a call that is about this connection.
func (p *PacketConn) opError(op string, err error) error {
	if err == nil {
		return nil
	}
	return opError(op, p.LocalAddr(), p.RemoteAddr(), err)
}

func (p *PacketConn) changeGroups(op string, ifi *net.Interface, group net.Addr, change func(*net.Interface, netip.Addr) error) error {
	addr, err := groupOf(group)
	if err == nil {
		ifi, err = interfaceOf(ifi, addr)
	}
	if err != nil {
		return opError(op, p.LocalAddr(), nil, err)
	}
	err = change(ifi, addr)
	runtime.KeepAlive(p)
	return opError(op, p.LocalAddr(), group, dialError(err))
}

// asEngine returns ds as the type of package udconn, whose fields are the same. A batch is
// not copied, because it may be long.
func asEngine(ds []Datagram) []udconn.Datagram {
	var _ = udconn.Datagram(Datagram{}) // The compiler refuses other fields, or another order.
	return unsafe.Slice((*udconn.Datagram)(unsafe.Pointer(unsafe.SliceData(ds))), len(ds))
}

// tryPacket returns the attempts of Dial to reach an address with datagrams.
func tryPacket(cfg *Config) func(ctx context.Context, p ibv.Provider, local, remote netip.AddrPort) (net.Conn, error) {
	return func(ctx context.Context, p ibv.Provider, local, remote netip.AddrPort) (net.Conn, error) {
		c, err := connectPacket(ctx, cfg, p, local, remote)
		if err != nil {
			return nil, err
		}
		return newPacketConn(cfg, c), nil
	}
}
