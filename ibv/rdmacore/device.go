//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
)

// device implements ibv.Device.
type device struct {
	lib  *library
	c    *C.struct_rn_context
	name string
	attr ibv.DeviceAttr

	// Linux's two software devices, which differ from others in places.
	siw bool
	rxe bool

	direct bool // direct is set if the calls that each message needs go around cgo.

	vectors atomic.Uint32 // vectors is how many completion vectors were used.

	// unsolicited is set when the device has refused to be armed for solicited events only.
	unsolicited atomic.Bool
}

// solicited reports whether the device can be armed for solicited events only, as far as
// that is known.
func (d *device) solicited() bool {
	return d.attr.Caps.Has(ibv.CapSolicited) && !d.unsolicited.Load()
}

// vector returns the completion vector of the next completion queue. The queues use the
// vectors in turn, so that no processor gets the interrupts of all queues.
func (d *device) vector() int {
	n := max(uint32(d.c.num_comp_vectors), 1)
	return int((d.vectors.Add(1) - 1) % n)
}

// Enumerations of infiniband/verbs.h.
const (
	transportIWARP = 1

	linkIB       = 1
	linkEthernet = 2
)

// These are the lengths of a request's private data, without the part that rdma_cm uses.
// InfiniBand's REQ has 92 bytes, of which rdma_cm uses 36. rdma_cm has one byte for iWARP's
// length, also after siw has added the four bytes of MPA revision 2.
const (
	privateIB    = 56
	privateIWARP = 255 - 4
)

const (
	vendorSIW = 0x626d74
	vendorRXE = 0xffffff
)

// siwKeys is the depth of a completion queue of 1 MiB. siw's library takes the queue that
// the kernel puts at offset 0x90000 for a failed one. So after about 50 connections no more
// could be made. This queue takes that offset.
const siwKeys = 1 << 15

// Devices lists the devices that have a driver in user space and answer. Devices that do
// not answer are left out, see [Provider.Unusable]. Each call asks them again.
func (p *Provider) Devices() ([]ibv.Device, error) {
	found, err := p.lib.list()
	if err != nil {
		return nil, err
	}
	var devs []ibv.Device
	for _, d := range found {
		if p.cfg.Device == "" || p.cfg.Device == d.name {
			devs = append(devs, d)
		}
	}
	if len(devs) == 0 && p.cfg.Device != "" {
		if err := p.Unusable(); err != nil {
			return nil, fmt.Errorf("%s: device %q cannot be used: %w", Name, p.cfg.Device, err)
		}
		return nil, fmt.Errorf("%s: no device %q: %w", Name, p.cfg.Device, syscall.ENODEV)
	}
	return devs, nil
}

// Unusable returns the reasons why devices were left out of the last list, nil if none was.
// A device that has failed, or is being removed, does not answer. The other devices can be
// used. With Config.Device set only that device is reported.
func (p *Provider) Unusable() error {
	p.lib.mu.Lock()
	defer p.lib.mu.Unlock()
	var all []error
	for _, u := range p.lib.unusable {
		if p.cfg.Device == "" || p.cfg.Device == u.device {
			all = append(all, u.err)
		}
	}
	return errors.Join(all...)
}

// unusable is a device that cannot be used, and why.
type unusable struct {
	device string
	err    error
}

func (lib *library) list() ([]*device, error) {
	var list **C.struct_rn_context
	var n C.int
	err := errno(C.rn_devices(&list, &n))
	if err == nil {
		// This closes the devices that were removed, unless they are held.
		defer C.rn_free_devices(list)
	}
	if n == 0 {
		if err == nil || errors.Is(err, syscall.ENOENT) {
			err = syscall.ENODEV
		}
		// The library may find no device while one is being removed.
		if known := lib.known(); len(known) > 0 {
			return known, nil
		}
		return nil, noDevice(err)
	}
	var devs []*device
	var left []unusable
	var why []error
	for _, c := range unsafe.Slice(list, n) {
		d, err := lib.device(c)
		if err != nil {
			left = append(left, unusable{C.GoString(&c.device.name[0]), err})
			why = append(why, err)
			continue
		}
		devs = append(devs, d)
	}
	lib.mu.Lock()
	lib.unusable = left
	lib.mu.Unlock()
	if len(devs) == 0 {
		return nil, fmt.Errorf("%s: no RDMA device can be used: %w", Name, errors.Join(why...))
	}
	return devs, nil
}

// known lists the devices that were used before and are still there.
func (lib *library) known() (devs []*device) {
	lib.mu.Lock()
	defer lib.mu.Unlock()
	for _, d := range lib.devices {
		if _, err := os.Stat(filepath.Join("/sys/class/infiniband", d.name)); err == nil {
			devs = append(devs, d)
		}
	}
	return devs
}

// noDevice returns an error that says what is missing: the devices, or the access of user
// space to the kernel's devices.
func noDevice(err error) error {
	names, _ := filepath.Glob("/sys/class/infiniband/*")
	if len(names) == 0 {
		return fmt.Errorf("%s: the kernel has no RDMA device: %w", Name, err)
	}
	for i := range names {
		names[i] = filepath.Base(names[i])
	}
	return fmt.Errorf("%s: no RDMA device can be used (the kernel has %s: load ib_uverbs, install the drivers for user space, "+
		"Debian's ibverbs-providers, and see to it that this user may open /dev/infiniband/uverbs*): %w",
		Name, strings.Join(names, ", "), err)
}

// device returns the device of a context. The first time it asks for the device's limits.
func (lib *library) device(c *C.struct_rn_context) (*device, error) {
	lib.mu.Lock()
	defer lib.mu.Unlock()
	if d := lib.devices[c]; d != nil {
		return d, nil
	}
	d := &device{lib: lib, c: c, name: C.GoString(&c.device.name[0])}
	d.direct = d.callsDirectly()
	release, err := hold(c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.name, err)
	}
	defer func() {
		if lib.devices[c] == nil {
			release()
		}
	}()
	if err := d.query(); err != nil {
		return nil, fmt.Errorf("%s: query device: %w", d.name, err)
	}
	if d.siw {
		C.rn_occupy(c, siwKeys)
	}
	if err := errno(C.rn_nonblocking(c.async_fd)); err != nil {
		return nil, fmt.Errorf("%s: wait for its events: %w", d.name, err)
	}
	f, err := pollable(int(c.async_fd), d.name)
	if err != nil {
		return nil, fmt.Errorf("%s: wait for its events: %w", d.name, err)
	}
	lib.devices[c] = d
	go d.watch(f)
	return d, nil
}

// hold keeps the device open after it is removed. librdmacm would close a device that
// nobody uses then. A device list that is never freed counts as a user of all devices in
// it. If the device turns out to be of no use, release frees the list.
func hold(c *C.struct_rn_context) (release func(), err error) {
	var list **C.struct_rn_context
	var n C.int
	if err := errno(C.rn_devices(&list, &n)); err != nil {
		return nil, err
	}
	if slices.Contains(unsafe.Slice(list, n), c) {
		return func() { C.rn_free_devices(list) }, nil
	}
	C.rn_free_devices(list)
	return nil, syscall.ENODEV
}

func (d *device) query() error {
	var a C.struct_rn_device_attr
	if err := errno(C.rn_query_device(d.c, &a)); err != nil {
		return err
	}
	var port C.struct_rn_port_attr
	if err := errno(C.rn_query_port(d.c, 1, &port)); err != nil {
		return err
	}
	guid := *(*[8]byte)(unsafe.Pointer(&a.node_guid))
	d.attr = ibv.DeviceAttr{
		FWVersion: C.GoString(&a.fw_ver[0]),
		NodeGUID:  binary.BigEndian.Uint64(guid[:]),
		Ports:     int(a.phys_port_cnt),

		MaxQP:           int(a.max_qp),
		MaxQPWR:         int(a.max_qp_wr),
		MaxSGE:          int(a.max_sge),
		MaxSGERead:      int(a.max_sge_rd),
		MaxInline:       int(max(C.rn_probe_inline(d.c, typeRC), 0)),
		MaxCQ:           int(a.max_cq),
		MaxCQE:          int(a.max_cqe),
		MaxMR:           int(a.max_mr),
		MaxPD:           int(a.max_pd),
		MaxMRSize:       uint64(a.max_mr_size),
		MaxQPRdAtom:     min(int(a.max_qp_rd_atom), 255), // rdma_cm has a byte for it.
		MaxQPInitRdAtom: min(int(a.max_qp_init_rd_atom), 255),
		MaxPrivateData:  privateIB,
	}
	if d.attr.MaxSGERead == 0 {
		d.attr.MaxSGERead = 1
	}
	switch a.vendor_id {
	case vendorSIW: // which never raises an event for solicited completions
		d.siw = true
		d.attr.MaxQPWR -= nudges
		d.attr.Quirks = ibv.Quirks{
			ReadsOutOfOrder:   true,
			ReadsStall:        true,
			SendsBuffered:     true, // It hands TCP the pages of unsignaled sends, and copies the others.
			EmptyReadsGarbled: true,
			ReadsUnchecked:    true,
			VagueErrors:       true,
		}
	case vendorRXE: // which raises one for solicited completions, but not for failures
		d.rxe = true
		d.attr.Quirks.VagueErrors = true
	default: // no attribute tells which devices lack it: see Arm
		d.attr.Caps |= ibv.CapSolicited
	}
	d.attr.MaxMessageSize = uint64(port.max_msg_sz)
	switch {
	case d.c.device.transport_type == transportIWARP:
		d.attr.Transport = ibv.TransportIWARP
		d.attr.Caps |= ibv.CapTCPPorts
		d.attr.MaxPrivateData = privateIWARP
	case port.link_layer == linkEthernet:
		d.attr.Transport = ibv.TransportRoCE
	default:
		d.attr.Transport = ibv.TransportIB
	}
	if d.attr.Transport != ibv.TransportIWARP {
		d.attr.Caps |= ibv.CapSendImm | ibv.CapWriteImm | ibv.CapEmptyReads
		if inline := C.rn_probe_inline(d.c, typeUD); inline >= 0 { // some drivers of RoCE have none
			d.attr.Caps |= ibv.CapUD
			d.attr.MaxAH = int(a.max_ah)
			d.attr.MaxInlineUD = int(inline)
			d.attr.MaxPrivateDataUD = privateUD
			if a.max_mcast_grp > 0 {
				d.attr.Caps |= ibv.CapMulticast
				d.attr.MaxMcastGrp = int(a.max_mcast_grp)
				d.attr.MaxMcastQPAttach = int(a.max_mcast_qp_attach)
			}
		}
		if a.atomic_cap != 0 {
			d.attr.Caps |= ibv.CapAtomic
		}
	}
	return nil
}

func (d *device) Name() string { return d.name }

func (d *device) Attr() ibv.DeviceAttr {
	a := d.attr
	if d.unsolicited.Load() {
		a.Caps &^= ibv.CapSolicited
	}
	return a
}

// mtus are the sizes that enum ibv_mtu numbers.
var mtus = [...]int{0, 256, 512, 1024, 2048, 4096}

func (d *device) Port(n int) (ibv.PortAttr, error) {
	if n < 1 || n > d.attr.Ports {
		return ibv.PortAttr{}, fmt.Errorf("%s: port %d of %d: %w", d.name, n, d.attr.Ports, syscall.EINVAL)
	}
	var a C.struct_rn_port_attr
	if err := errno(C.rn_query_port(d.c, C.int(n), &a)); err != nil {
		return ibv.PortAttr{}, fmt.Errorf("%s: query port %d: %w", d.name, n, err)
	}
	p := ibv.PortAttr{State: ibv.PortDown}
	switch a.state { // enum ibv_port_state
	case 2:
		p.State = ibv.PortInit
	case 3:
		p.State = ibv.PortArmed
	case 4, 5:
		p.State = ibv.PortActive
	}
	p.ActiveMTU = mtu(a.active_mtu)
	for i := range a.gid_tbl_len {
		var gid ibv.GID
		if C.rn_query_gid(d.c, C.int(n), i, (*C.uint8_t)(unsafe.Pointer(&gid))) == 0 && gid != (ibv.GID{}) {
			p.GIDs = append(p.GIDs, gid)
		}
	}
	p.NetDev = d.netDev(n)
	return p, nil
}

// netDev returns the network interface of a port from sysfs: that of the first GID, or on
// iWARP the one that the device belongs to.
func (d *device) netDev(port int) string {
	ndevs := filepath.Join("/sys/class/infiniband", d.name, "ports", strconv.Itoa(port), "gid_attrs/ndevs")
	entries, _ := os.ReadDir(ndevs)
	for _, e := range entries {
		if b, err := os.ReadFile(filepath.Join(ndevs, e.Name())); err == nil && len(b) > 1 {
			return strings.TrimSpace(string(b))
		}
	}
	return ""
}

// Asynchronous events of infiniband/verbs.h.
const (
	asyncCQErr       = 0
	asyncQPFatal     = 1
	asyncQPReqErr    = 2
	asyncQPAccessErr = 3
	asyncCommEst     = 4
	asyncDeviceFatal = 8
	asyncPortErr     = 10
)

// watch passes the device's events to the objects that they concern, as long as the process
// lives.
func (d *device) watch(f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	var info C.struct_rn_async_info
	raw.Read(func(uintptr) bool {
		for {
			switch rc := C.rn_async_event(d.c, &info); rc {
			case 0:
				d.event(&info)
			case -C.int(syscall.EINTR):
			case -C.int(syscall.EAGAIN):
				return false
			default:
				return true // The device was removed. rdma_cm reports that too.
			}
		}
	})
}

func (d *device) event(info *C.struct_rn_async_info) {
	switch info.event {
	case asyncCQErr:
		if c, ok := lookup(info.handle).(*cq); ok {
			c.overrun.Store(true)
			c.Interrupt()
		}
	case asyncQPFatal, asyncQPReqErr, asyncQPAccessErr:
		if i, ok := lookup(info.handle).(*id); ok {
			i.event(ibv.Event{Kind: ibv.EventQPFatal, Err: asyncError(info.event)})
		}
	case asyncCommEst:
		if i, ok := lookup(info.handle).(*id); ok {
			i.heard()
		}
	case asyncPortErr:
		d.all(func(i *id) {
			if i.port == int(info.port) {
				i.event(ibv.Event{Kind: ibv.EventPortError, Err: syscall.ENETDOWN})
			}
		})
	case asyncDeviceFatal:
		d.all(func(i *id) { i.event(ibv.Event{Kind: ibv.EventDeviceRemoval, Err: syscall.ENODEV}) })
	}
}

// all calls f for every connection of the device.
func (d *device) all(f func(*id)) {
	handles.RLock()
	var ids []*id
	for _, v := range handles.m {
		if i, ok := v.(*id); ok {
			ids = append(ids, i)
		}
	}
	handles.RUnlock()
	for _, i := range ids {
		i.mu.Lock()
		of := i.dev
		i.mu.Unlock()
		if of == d {
			f(i)
		}
	}
}

func asyncError(event C.uint32_t) error {
	switch event {
	case asyncQPReqErr:
		return errors.New("the peer's request was invalid")
	case asyncQPAccessErr:
		return errors.New("the peer had no right to the memory it named")
	}
	return errors.New("the device gave up the queue pair")
}
