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

// ListenPacket opens a connection for datagrams at the local address. network is
// "udp", "udp4" (IPv4 only), "udp6" (IPv6 only), or "rdma", "rdma4", "rdma6", which
// mean the same here; address is host:port, where an empty host means every
// address and port 0 a port that is free. What is returned is a *PacketConn.
//
// It takes the RDMA device that has the address, if that can do datagrams (siw
// cannot), and the software device beside it: see [PacketConn].
func ListenPacket(network, address string) (net.PacketConn, error) {
	return new(ListenConfig).ListenPacket(context.Background(), network, address)
}

// ListenPacket opens a connection for datagrams; see the function ListenPacket.
// ctx concerns opening only. Backlog does not apply.
func (lc *ListenConfig) ListenPacket(ctx context.Context, network, address string) (net.PacketConn, error) {
	c, addr, err := lc.listenPacket(ctx, network, address)
	if err != nil {
		return nil, opError("listen", nil, addr, dialError(err))
	}
	return newPacketConn(&lc.Config, c), nil
}

// ListenMulticast opens a connection that hears an IP multicast group at the port of
// gaddr, as net.ListenMulticastUDP does. network is as in ListenPacket; ifi says by which
// interface, nil leaves it to the system's routes, which is not recommended.
//
// It listens on every address, and several may listen on the same port so. What is
// sent to that port of one address, an answer for instance, reaches one of them: over
// UDP the one that was opened last, over RDMA devices the first. It sends to groups by
// ifi, and does not hear what it sends itself, until SetMulticastLoopback says so. More
// groups are for [PacketConn.JoinGroup].
func ListenMulticast(network string, ifi *net.Interface, gaddr *net.UDPAddr) (*PacketConn, error) {
	return new(ListenConfig).ListenMulticast(context.Background(), network, ifi, gaddr)
}

// ListenMulticast opens a connection that hears a group; see the function
// ListenMulticast. ctx concerns opening only. Backlog does not apply.
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

// PacketConn sends and receives datagrams. It implements net.PacketConn, and
// net.Conn where it came from Dial, which has connected it to one peer. All methods
// may be called by several goroutines at once.
//
// Over an RDMA device each datagram is one Send of a UD queue pair; rdma_cm's port
// space of UDP tells which queue pair serves an address. Over the software device it
// is one UDP datagram, so that the peer may be any program that speaks UDP. One that
// was opened with neither Config.Device nor Config.RequireRDMA has both, on the same
// port: it receives by either, and sends to each peer by the RDMA device if the peer
// answers there, else by the software device.
//
// Datagrams may be lost, doubled and late, but those to one peer leave in the order
// in which they were written. They are never fragmented: what is longer than
// [PacketConn.MaxDatagramSize] matches syscall.EMSGSIZE. Empty ones are legal. One
// that finds the reader's buffer full is dropped and counted.
//
// IP multicast groups are heard by [ListenMulticast] and [PacketConn.JoinGroup], and written
// to as any address is. A connection that has both devices hears them by either, and writes
// to them by UDP, which every member hears that has it; those with an RDMA device alone
// form a group of their own. Broadcast is for the software device; an RDMA device alone refuses it
// with an error that matches errors.ErrUnsupported.
//
// A buffer that is passed to a method is the package's only until the call returns.
//
// Before the first datagram to an address goes out by an RDMA device the address must be
// resolved. That happens beside everything else: a few datagrams wait for it
// meanwhile, and the call that wrote them returns at once. If nobody serves the
// address the next write to it fails, with ECONNREFUSED or a timeout. What was
// resolved is looked up again when the peer is silent for a while, so that a peer
// that was started anew is found.
//
// A PacketConn that the program drops without Close is closed when the garbage collector
// finds it. Config.Logger receives a warning, or slog.Default() if that is nil.
type PacketConn struct {
	conn *udconn.Conn
}

// ReadFrom waits for a datagram and copies it into b; what does not fit is lost, as
// with UDP. addr is a *net.UDPAddr. Errors: os.ErrDeadlineExceeded, net.ErrClosed.
func (p *PacketConn) ReadFrom(b []byte) (n int, addr net.Addr, err error) {
	n, from, err := p.conn.Read(b)
	runtime.KeepAlive(p)
	if err != nil {
		return 0, nil, p.opError("read", err)
	}
	return n, udpAddr(from), nil
}

// ReadFromUDPAddrPort is ReadFrom without an allocation. An IPv4 address has four
// bytes.
func (p *PacketConn) ReadFromUDPAddrPort(b []byte) (n int, addr netip.AddrPort, err error) {
	n, addr, err = p.conn.Read(b)
	runtime.KeepAlive(p)
	return n, addr, p.opError("read", err)
}

// Read is ReadFrom for a connected one.
func (p *PacketConn) Read(b []byte) (int, error) {
	n, _, err := p.conn.Read(b)
	runtime.KeepAlive(p)
	return n, p.opError("read", err)
}

// WriteTo sends b to addr, a *net.UDPAddr. Errors: syscall.EMSGSIZE for more than
// [PacketConn.MaxDatagramSize], os.ErrDeadlineExceeded while the device is busy,
// net.ErrClosed; syscall.ECONNREFUSED or one that is a timeout where an earlier
// datagram found that nobody serves the address; net.ErrWriteToConnected;
// syscall.EAFNOSUPPORT for an address of a family that the connection is not open for.
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

// Write is WriteTo for a connected one. Otherwise the error matches
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

// RemoteAddr returns the peer of a connected one, a *net.UDPAddr, else nil.
func (p *PacketConn) RemoteAddr() net.Addr {
	if addr := p.conn.RemoteAddr(); addr != nil {
		return addr
	}
	return nil
}

// MaxDatagramSize returns the most bytes that a datagram may have: of all devices and
// interfaces that the local address may lead out by, the least of what one of their
// packets carries. RDMA devices have 256 to 4096, by the MTU of their network.
func (p *PacketConn) MaxDatagramSize() int { return p.conn.Limit() }

// SetDeadline bounds Read and Write calls, also those in progress; a zero t is no
// bound.
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

// SetReadBuffer sets how many bytes of datagrams may wait for the reader, each
// counted with 128 more; it begins with 256 KiB. At most it is 1 GiB, and one
// datagram has always room. What an RDMA device itself holds until it is looked at
// does not count.
func (p *PacketConn) SetReadBuffer(bytes int) error {
	return p.opError("set", p.conn.SetReadBuffer(bytes))
}

// SetWriteBuffer sets the size of the socket's buffer where the software device serves.
// The send queue of an RDMA device is as long as it is.
func (p *PacketConn) SetWriteBuffer(bytes int) error {
	return p.opError("set", p.conn.SetWriteBuffer(bytes))
}

// Close ends the connection. What was handed to a device before is sent, within
// Config.LingerTimeout; what still waits for an address to be resolved is dropped.
func (p *PacketConn) Close() error {
	err := p.conn.Close()
	runtime.KeepAlive(p)
	return p.opError("close", err)
}

// Stats returns the counters of the moment.
func (p *PacketConn) Stats() PacketStats { return PacketStats(p.conn.Stats()) }

// Info returns the ways that are open, RDMA devices first. One that was opened for
// every address takes a device when the first peer needs it.
func (p *PacketConn) Info() []PacketInfo {
	var infos []PacketInfo
	for _, info := range p.conn.Info() {
		infos = append(infos, PacketInfo(info))
	}
	return infos
}

// ReadBatch waits for a datagram and takes it, and those behind it that are there
// too, as far as ds goes. It returns how many; of those N and Addr are set. What does
// not fit into a Buf is lost, as in ReadFrom, whose errors it has. If ds is empty it
// returns at once.
//
// It allocates nothing.
func (p *PacketConn) ReadBatch(ds []Datagram) (n int, err error) {
	n, err = p.conn.ReadBatch(asEngine(ds))
	runtime.KeepAlive(p)
	return n, p.opError("read", err)
}

// WriteBatch sends datagrams in the order of ds, each as WriteTo sends one, and hands
// those that go by an RDMA device to it up to 32 at a time, which takes less than as
// many calls. On a connected one Addr may be missing, or the peer's.
//
// It returns how many were written. If that is not all of them err says why the next
// one was not: the errors of WriteTo, and of Write for a connected one. Those behind it
// may be written by another call.
//
// Of a batch to an address that has yet to be resolved no more is kept than of single
// datagrams; PacketStats.Unsent counts the rest.
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

// JoinGroup joins an IP multicast group, a *net.UDPAddr (whose port does not matter) or
// *net.IPAddr, by an interface, nil for the one that the system chooses. From then on what
// is sent to the group and this connection's port is read, whoever sends it, with the
// sender's own address. With the software device the connection must be open on every
// address. Groups are left when the connection is closed.
//
// Errors: syscall.EADDRINUSE for a group that was joined by the interface already,
// syscall.ENOBUFS for too many (64; Linux allows a UDP socket 20 unless
// net.ipv4.igmp_max_memberships says more), syscall.EADDRNOTAVAIL where there is nothing to
// join by, errors.ErrUnsupported where no device has groups of the family.
func (p *PacketConn) JoinGroup(ifi *net.Interface, group net.Addr) error {
	return p.changeGroups("join", ifi, group, p.conn.JoinGroup)
}

// LeaveGroup leaves a group that was joined by the interface. What came before may still
// be read. One that was not joined: syscall.EADDRNOTAVAIL.
func (p *PacketConn) LeaveGroup(ifi *net.Interface, group net.Addr) error {
	return p.changeGroups("leave", ifi, group, p.conn.LeaveGroup)
}

// SetMulticastLoopback says whether datagrams to groups that the connection is a member of
// come back to it: they do unless ListenMulticast has opened it. Over the software device
// it holds for all members on this host (IP_MULTICAST_LOOP), but not by the loopback
// interface, where all comes back. An RDMA device hands them to all members, and the
// connection drops what it has sent itself (PacketStats.Looped).
func (p *PacketConn) SetMulticastLoopback(on bool) error {
	return p.opError("set", p.conn.SetMulticastLoopback(on))
}

// SetMulticastInterface says by which interface datagrams to groups leave. nil leaves it
// to the system's routes, as it is at first.
func (p *PacketConn) SetMulticastInterface(ifi *net.Interface) error {
	return p.opError("set", p.conn.SetMulticastInterface(ifi))
}

// Datagram is one of those that [PacketConn.ReadBatch] and [PacketConn.WriteBatch]
// take.
type Datagram struct {
	Buf  []byte         // what is sent; where a received one goes
	N    int            // how many bytes of Buf were received; WriteBatch sends all of Buf
	Addr netip.AddrPort // whom it is for, or from; an IPv4 address from there has four bytes
}

// PacketStats counts what a PacketConn has done since it was opened.
type PacketStats struct {
	DatagramsSent     uint64 // written without an error
	DatagramsReceived uint64 // read
	BytesSent         uint64 // payload
	BytesReceived     uint64

	// What was dropped: on arrival because the reader lagged behind, and because
	// its sender is unknown, or not the peer of a connected one, or it was for
	// another port of a group. An RDMA device
	// drops by itself, and tells nobody, what comes with a wrong key, and while
	// no receive is posted: those of Receives and what waits for the reader are
	// there before that happens.
	Overruns uint64
	Strays   uint64

	// What was sent to a group, came back from an RDMA device and was not wanted;
	// see SetMulticastLoopback.
	Looped uint64

	// What was written and then dropped: too much waited for an address to be
	// resolved, or it came to nothing.
	Unsent uint64

	// Over RDMA devices: addresses that were asked for, those of them that came
	// to nothing, and how often a write had to wait for the send queue.
	Resolutions        uint64
	ResolutionFailures uint64
	QueueStalls        uint64

	Peers    int // addresses that are known
	Receives int // datagrams that RDMA devices have room for
}

// PacketInfo tells of one way by which a PacketConn sends and receives.
type PacketInfo struct {
	Device    string // "iwarp" for the software device
	Transport string // "UDP", "RoCE"
	Port      int    // of the device, counted from 1
	QPN       uint32 // queue pair number, 0 over the software device
	MTU       int    // bytes that a datagram may have there
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
