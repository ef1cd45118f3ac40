package rdmanet

import (
	"net"
	"net/netip"
	"runtime"
	"time"
)

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
	*packetConn
}

// ReadFrom waits for a datagram and copies it into b; what does not fit is lost, as
// with UDP. addr is a *net.UDPAddr. Errors: os.ErrDeadlineExceeded, net.ErrClosed.
func (p *PacketConn) ReadFrom(b []byte) (n int, addr net.Addr, err error) {
	n, addr, err = p.packetConn.ReadFrom(b)
	runtime.KeepAlive(p)
	return n, addr, err
}

// ReadFromUDPAddrPort is ReadFrom without an allocation. An IPv4 address has four
// bytes.
func (p *PacketConn) ReadFromUDPAddrPort(b []byte) (n int, addr netip.AddrPort, err error) {
	n, addr, err = p.packetConn.ReadFromUDPAddrPort(b)
	runtime.KeepAlive(p)
	return n, addr, err
}

// Read is ReadFrom for a connected one.
func (p *PacketConn) Read(b []byte) (int, error) {
	n, err := p.packetConn.Read(b)
	runtime.KeepAlive(p)
	return n, err
}

// WriteTo sends b to addr, a *net.UDPAddr. Errors: syscall.EMSGSIZE for more than
// [PacketConn.MaxDatagramSize], os.ErrDeadlineExceeded while the device is busy,
// net.ErrClosed; syscall.ECONNREFUSED or one that is a timeout where an earlier
// datagram found that nobody serves the address; net.ErrWriteToConnected;
// syscall.EAFNOSUPPORT for an address of a family that the connection is not open for.
func (p *PacketConn) WriteTo(b []byte, addr net.Addr) (int, error) {
	n, err := p.packetConn.WriteTo(b, addr)
	runtime.KeepAlive(p)
	return n, err
}

// WriteToUDPAddrPort is WriteTo without an allocation.
func (p *PacketConn) WriteToUDPAddrPort(b []byte, addr netip.AddrPort) (int, error) {
	n, err := p.packetConn.WriteToUDPAddrPort(b, addr)
	runtime.KeepAlive(p)
	return n, err
}

// Write is WriteTo for a connected one. Otherwise the error matches
// syscall.EDESTADDRREQ.
func (p *PacketConn) Write(b []byte) (int, error) {
	n, err := p.packetConn.Write(b)
	runtime.KeepAlive(p)
	return n, err
}

// LocalAddr returns the local address, a *net.UDPAddr with the port that was chosen.
func (p *PacketConn) LocalAddr() net.Addr {
	return p.packetConn.LocalAddr()
}

// RemoteAddr returns the peer of a connected one, a *net.UDPAddr, else nil.
func (p *PacketConn) RemoteAddr() net.Addr {
	return p.packetConn.RemoteAddr()
}

// MaxDatagramSize returns the most bytes that a datagram may have: of all devices and
// interfaces that the local address may lead out by, the least of what one of their
// packets carries. RDMA devices have 256 to 4096, by the MTU of their network.
func (p *PacketConn) MaxDatagramSize() int {
	return p.packetConn.MaxDatagramSize()
}

// SetDeadline bounds Read and Write calls, also those in progress; a zero t is no
// bound.
func (p *PacketConn) SetDeadline(t time.Time) error {
	return p.packetConn.SetDeadline(t)
}

// SetReadDeadline is SetDeadline for reading.
func (p *PacketConn) SetReadDeadline(t time.Time) error {
	return p.packetConn.SetReadDeadline(t)
}

// SetWriteDeadline is SetDeadline for writing.
func (p *PacketConn) SetWriteDeadline(t time.Time) error {
	return p.packetConn.SetWriteDeadline(t)
}

// SetReadBuffer sets how many bytes of datagrams may wait for the reader, each
// counted with 128 more; it begins with 256 KiB. At most it is 1 GiB, and one
// datagram has always room. What an RDMA device itself holds until it is looked at
// does not count.
func (p *PacketConn) SetReadBuffer(bytes int) error {
	return p.packetConn.SetReadBuffer(bytes)
}

// SetWriteBuffer sets the size of the socket's buffer where the software device serves.
// The send queue of an RDMA device is as long as it is.
func (p *PacketConn) SetWriteBuffer(bytes int) error {
	return p.packetConn.SetWriteBuffer(bytes)
}

// Close ends the connection. What was handed to a device before is sent, within
// Config.LingerTimeout; what still waits for an address to be resolved is dropped.
func (p *PacketConn) Close() error {
	err := p.packetConn.Close()
	runtime.KeepAlive(p)
	return err
}

// Stats returns the counters of the moment.
func (p *PacketConn) Stats() PacketStats {
	return p.packetConn.Stats()
}

// Info returns the ways that are open, RDMA devices first. One that was opened for
// every address takes a device when the first peer needs it.
func (p *PacketConn) Info() []PacketInfo {
	return p.packetConn.Info()
}

// ReadBatch waits for a datagram and takes it, and those behind it that are there
// too, as far as ds goes. It returns how many; of those N and Addr are set. What does
// not fit into a Buf is lost, as in ReadFrom, whose errors it has. If ds is empty it
// returns at once.
//
// It allocates nothing.
func (p *PacketConn) ReadBatch(ds []Datagram) (n int, err error) {
	n, err = p.packetConn.ReadBatch(ds)
	runtime.KeepAlive(p)
	return n, err
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
	n, err = p.packetConn.WriteBatch(ds)
	runtime.KeepAlive(p)
	return n, err
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
	err := p.packetConn.JoinGroup(ifi, group)
	runtime.KeepAlive(p)
	return err
}

// LeaveGroup leaves a group that was joined by the interface. What came before may still
// be read. One that was not joined: syscall.EADDRNOTAVAIL.
func (p *PacketConn) LeaveGroup(ifi *net.Interface, group net.Addr) error {
	err := p.packetConn.LeaveGroup(ifi, group)
	runtime.KeepAlive(p)
	return err
}

// SetMulticastLoopback says whether datagrams to groups that the connection is a member of
// come back to it: they do unless ListenMulticast has opened it. Over the software device
// it holds for all members on this host (IP_MULTICAST_LOOP), but not by the loopback
// interface, where all comes back. An RDMA device hands them to all members, and the
// connection drops what it has sent itself (PacketStats.Looped).
func (p *PacketConn) SetMulticastLoopback(on bool) error {
	return p.packetConn.SetMulticastLoopback(on)
}

// SetMulticastInterface says by which interface datagrams to groups leave. nil leaves it
// to the system's routes, as it is at first.
func (p *PacketConn) SetMulticastInterface(ifi *net.Interface) error {
	return p.packetConn.SetMulticastInterface(ifi)
}
